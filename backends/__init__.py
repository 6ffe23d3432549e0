"""The backends that ship with xamp, one module or folder each. Only xamp's registry imports them, on demand.

They are installed as ``xamp.backends``. If this file were imported as ``backends`` (from the root of a checkout, say),
it would be a second module with its own classes, and ``isinstance`` would not recognise them; hence the guard.
"""

if __name__ == "backends":
    raise ImportError("this package is xamp.backends: write `import xamp.backends`, not `import backends`")

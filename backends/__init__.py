"""The backends that ship with xamp, one room each; only the registry of xamp imports them, and only when asked for.

Installed as ``xamp.backends``. Imported as ``backends`` (from the root of a checkout, say) the same file would be a
second module with classes of its own, which no ``isinstance`` would recognise; hence the guard.
"""

if __name__ == "backends":
    raise ImportError("this package is xamp.backends: write `import xamp.backends`, not `import backends`")

"""The registered backends: which there are, which of them work here, and why one does not.

- A trial tells of the device, not of the moment. What a trial finds out is kept for the process, so it runs without
  the caller's default dtype and device, autocast and ban on waits (``device_trials``), and not while a graph is
  captured. Where no memory is left or the device is busy a trial raises, and gives no answer. A backend whose probe
  fails stays out for the process, with the reason.

- The device in use is remembered in one place (``device_in_use.in_use``), by the environment and the registry's
  ``generation``. Code that caches something about the device keeps the object that ``in_use`` returned, and compares
  by ``is``.
"""

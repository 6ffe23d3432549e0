"""Torch as its releases and modes differ, and its operators on lists. Of xamp, it imports nothing.

Modules: ``kernels`` calls torch's operators on lists, and single ones in place of those that a device lacks; ``pieces``
applies a rule to lists in pieces, so that its temporaries stay small; ``closures`` calls those of a step; ``compiler``
keeps functions out of torch.compile, ``cache_keys`` tells its caches apart; ``torch_features`` has what releases do
differently, ``norms`` the classes of norms; ``torch_private`` has the private names of torch.
"""

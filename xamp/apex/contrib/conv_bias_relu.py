"""Left out. ``LEFT_OUT`` in :mod:`xamp.apex._modules` says what takes its place."""

from xamp.apex._modules import left_out

raise left_out("apex.contrib.conv_bias_relu")

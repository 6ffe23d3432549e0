"""The releases of torch on which xamp is tested: their environments, and what runs in each."""

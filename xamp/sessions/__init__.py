"""The public calls of xamp. They combine what the other packages do."""

"""The modules that pickles of xamp 0.1.0 name; ``xamp.__path__`` leads here."""

"""Files and folders of other programs: which entries are the model, one module for each folder."""

"""Reading, writing and converting files of other formats."""

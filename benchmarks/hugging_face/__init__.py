"""Times Hugging Face models that the main benchmark does not know, each against training of its own kind."""

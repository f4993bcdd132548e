"""The experts themselves."""

"""Training of the default vision-language model's projector. Not part of the installed package."""

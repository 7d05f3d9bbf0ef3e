"""Places where other libraries call the operators of this one. Each module imports its library only when used."""

"""What models of NeMo are made of, and how their archives are read."""

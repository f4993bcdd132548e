"""The abacus chip for baige-device."""

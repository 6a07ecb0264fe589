"""Placement planned for single steps against placement planned for their mean, on steps that no plan has seen."""

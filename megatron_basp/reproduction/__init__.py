"""The paper's tables, and what it left open: its figures beside modelled and measured ones. Pure but for its files."""

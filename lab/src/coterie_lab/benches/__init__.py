"""Groups of benchmarks of Coterie itself; the entry points `coterie.benches` name them."""

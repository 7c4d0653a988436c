"""One script a question, peers in the same run; installed as rdmafork.benchmarks."""

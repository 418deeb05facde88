"""Training on a cluster in a box: nodes are network namespaces, and modes take turns step by step."""

"""What plans are chosen among, by brute force."""


def all_decompositions(rows, ranks, sizes):
    """Every way to use up `rows` with waves whose rows are a multiple of N/K, as rows for each K."""
    if not sizes:
        return [{}] if rows == 0 else []
    size, *others = sizes
    return [
        {size: taken, **rest} if taken else rest
        for taken in range(0, rows + 1, ranks // size)
        for rest in all_decompositions(rows - taken, ranks, others)
    ]

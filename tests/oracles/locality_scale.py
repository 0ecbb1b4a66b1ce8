"""Algorithm 2 of Song and Jiang (ICS 2022) line by line, with the variables of the paper."""


def algorithm_2(loading_shares, r_lower, r_upper, s_max):
    """Return the scale of each epoch, the first one before any share was seen, and whether it ended fixed."""
    s, s_prev, fixed = 1.0, 1.0, False
    scales = [s]
    for r in loading_shares:
        if not fixed:
            if s >= s_max:
                fixed = True
            elif r > r_upper:
                s_prev = s
                s = 2 * s
                if s > s_max:
                    s = s_max
            elif r < r_lower and s != 1:
                s = (s + s_prev) / 2
            else:
                fixed = True
        scales.append(s)
    return scales, fixed

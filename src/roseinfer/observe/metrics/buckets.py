"""The ladders of upper bounds that histograms count by; knows nothing of what is counted.

Each agreed threshold of a service level is a bound, so its share of good events is exact. An unbounded bucket follows
each ladder.
"""

HOST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.32, 0.5, 0.64),
    *(1.0, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
REQUEST_S = (*(round(0.01 * 2**i, 2) for i in range(14)), 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(4**i) for i in range(10))
SEQUENCES = tuple(float(2**i) for i in range(10))

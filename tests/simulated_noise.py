"""Times of cells as a GPU's noise makes them: drift from round to round, autocorrelation and two modes within one."""

import numpy as np

SHAPES, IMPLEMENTATIONS = 10, 5
CELLS = SHAPES * IMPLEMENTATIONS
ROUNDS, SAMPLES = 20, 10  # the default limits of a sweep
DRIFT = 0.01
WITHIN = np.linspace(0.005, 0.02, CELLS)[:, None, None]
AUTOCORRELATION = 0.6
SECOND_MODE, SHARE_OF_SECOND_MODE, STICKINESS = 0.025, 0.25, 0.7
PAIRS = 5  # the default of `mtabench ab`
PROCESS_OFFSET, PAIR_DRIFT, DRIFT_IN_PAIR = 0.005, 0.01, 0.002
BIMODAL = (np.arange(CELLS) % 5 == 0)[:, None, None]


def simulated_run(generator):
    """The samples of a run in ms by round, `CELLS` arrays `[rounds, SAMPLES]`, stopped as a sweep stops."""
    times = simulated_times(generator)
    return [cell[:count] for cell, count in zip(times, stops(times), strict=True)]


def simulated_pairs(generator):
    """The samples of two sides, by cell and process: each cell of a process has an offset, each pair a drift."""
    sides = ([], [])
    for _ in range(PAIRS):
        drift = generator.normal(0, PAIR_DRIFT)
        for side in sides:
            offsets = generator.normal(0, PROCESS_OFFSET, CELLS) + drift + generator.normal(0, DRIFT_IN_PAIR)
            side.append([cell * np.exp(one) for cell, one in zip(simulated_run(generator), offsets, strict=True)])
    return tuple([list(processes) for processes in zip(*side, strict=True)] for side in sides)


def simulated_times(generator):
    """The same without a stop: `[CELLS, ROUNDS, SAMPLES]`."""
    steps = generator.normal(size=(CELLS, ROUNDS, SAMPLES))
    noise, second = steps.copy(), generator.random(steps.shape) < SHARE_OF_SECOND_MODE
    stays = generator.random(steps.shape) < STICKINESS
    for i in range(1, SAMPLES):
        noise[..., i] = AUTOCORRELATION * noise[..., i - 1] + np.sqrt(1 - AUTOCORRELATION**2) * steps[..., i]
        second[..., i] = np.where(stays[..., i], second[..., i - 1], second[..., i])
    drift = np.repeat(generator.normal(0, DRIFT, (SHAPES, ROUNDS, 1)), IMPLEMENTATIONS, axis=0)
    return np.exp(drift + WITHIN * noise + SECOND_MODE * (second & BIMODAL))


def stops(times, fewest=5, target=0.005):
    """After how many rounds each cell's median is known within 0.5 %: a quick stand-in for the sweep's bootstrap."""
    medians = np.median(times, axis=-1)
    found = np.full(len(medians), medians.shape[1])
    for count in reversed(range(fewest, medians.shape[1])):
        known = medians[:, :count]
        reach = 1.1 * 1.96 * known.std(axis=1) / np.sqrt(count)
        found[reach <= target * known.mean(axis=1)] = count
    return found

"""Speedup over the baseline as a heat map: sequence length by convolution."""

from functools import partial

from mtabench.charts.chart import Kind
from mtabench.charts.heatmap import chart
from mtabench.problem.operations import OPERATION_COLUMNS

KIND = Kind(
    "speedups of at least two convolutions (such as --conv 6x11,3x3)", partial(chart, OPERATION_COLUMNS), place=3
)

"""Speedup over the baseline as a heat map: sequence length by convolution."""

from functools import partial

from mtabench.charts.chart import Kind
from mtabench.charts.data import CONV_COLUMNS
from mtabench.charts.heatmap import chart

KIND = Kind("speedups of at least two convolutions (such as --conv 6x11,3x3)", partial(chart, CONV_COLUMNS), place=3)

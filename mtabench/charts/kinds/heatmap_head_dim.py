"""Speedup over the baseline as a heat map: sequence length by head dim."""

from functools import partial

from mtabench.charts.chart import Kind
from mtabench.charts.kinds.heatmap_conv import HEAD_DIM_COLUMNS, chart

KIND = Kind("speedups of at least two head dims (such as --head-dim 64,128)", partial(chart, HEAD_DIM_COLUMNS), place=4)

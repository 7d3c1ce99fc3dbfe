"""The compute tail, without torch, sockets or clocks (DropCompute; spec C1 to C9).

samples, search  latencies by step, worker and micro-batch; their prefix times
finishing        the same where a started micro-batch is finished
threshold        the best threshold for given latencies: a pure function
stragglers       which workers are slow all the time, and how slow
budget           the live machine: is the step over, when to choose anew
compensation     what makes up for dropped samples
checks           numbers in their ranges
theory, distribution, bounds  the paper's formulas
noise, latencies, streaming   models of delay, drawn in blocks, in bounded memory
simulate, local_sgd_time      scale graphs and Local-SGD for any number of workers
columns, traces  reading and writing traces: CSV, Parquet, records
planner, resampling, plans, plan_words  what a bound would gain on a trace, in words
"""

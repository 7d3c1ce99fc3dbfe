"""The compute tail, without torch, sockets or clocks (DropCompute; spec C1 to C9).

samples      the array of latencies, and how cut steps are completed
threshold    the best threshold for given latencies: a pure function
stragglers   which workers are slow all the time, and how slow
theory       expected step time, kept share and speedup in closed form
noise        models of added delay, seeded
simulate     scale graphs for any number of workers, in bounded memory
planner      what a bound would gain on a recorded trace, in words
traces       reading and writing traces: CSV, Parquet, records
compensation what makes up for dropped samples
budget       the live machine: may another micro-batch start, when to choose anew
"""

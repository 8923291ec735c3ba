"""ds4-guard: runs one job so that it cannot take the host down with it.

policy.py decides (pure), probes.py looks, scope.py limits, job.py starts and ends the job's
processes, log.py records, watch.py puts them together, cli.py is the command.
"""

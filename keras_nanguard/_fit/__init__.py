"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts. Each
has one owner, whose methods change it; all others only read it. The files from top to bottom:

    the guard     attached (in a running fit), loop (without a fit), arguments
                  log (what is printed, and all incidents)
    a step        session (before and after it), tasks (between two)
    an incident   incidents: detect, explain, decide, perform, apply the effect, report
                  refusals (why a step was refused, and which ones loss scaling handles)
                  perform (one function for each action)
                  rollback (chooses a snapshot, restores it, and replays undone steps)
                  poles (of schedules), state_check (is the state finite?)
    lost runs     monitors, divergence (when to run trials), proof (what they show), trial
    data          bad_data (bad rows), batchnorm (moving statistics: do they follow?)
    callbacks     fit_logs (that others receive), firewall (what they save and compare)
                  results (of evaluate and predict that are not finite)
    the facts     run, steps (counts, batches, due tasks), recovery (policy), rates
                  snapshots, snapshot_files (those on disk), resume
                  agreement (one decision in several processes)
"""

"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. It is a `run.Run`, the state of
the run that all other files read, with the tasks that fall due between two steps (`session.TASKS`).
The files by topic:

    a step        session, run (counters, findings), agreement (several processes)
    an incident   incidents: detect, explain, decide, perform, report
                  bad_rows (of the data), perform (the actions)
    rollback      rollback (restore and replay), recent_batches, snapshots, snapshots_on_disk,
                  resume, guard_state
    changes       recovery, learning_rates (the policy's changes)
    finite        monitors, divergence, trial
    the guard     arguments, running_fit, loops, results, callbacks (what the other ones receive)
    reports       reports, recorded
"""

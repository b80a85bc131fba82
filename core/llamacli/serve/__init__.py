"""Server: scheduling of requests, and the APIs above it.

Eight classes make a step of the scheduler:

- `sequences.RequestState`: a request that was taken, its times and counts.
- `sequences.SequenceState`: a prompt, then a choice after it: the `TokenSequence` of `llamacli.generation` here.
- `queue.FairQueue`: prompts that wait. `running.Running`: sequences that were admitted or preempted.
- `cache.CacheMemory`: the limit of cache pages, and kept prefixes.
- `planning.Planner`: the chunks of a step. `lifecycle.Lifecycle`: events, counts and ends of requests.
- `scheduler.Scheduler`: admits, evaluates chunks, draws tokens.

Draws, texts, drafts and the cost of steps are those of `llamacli.generation`.
"""

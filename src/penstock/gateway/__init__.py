"""The public door: who may enter, to which replica, and the bytes there and back. Which file answers which question:

One request, in the order it meets them:
    door            who may come in, and to which model; owns the admission, the roster and the clock
    asked, hints    what is read of its body, and of its headers
    inquiry         what was read, in one object that never changes
    standing        what follows from what its tenant is
    facts, referee, ruling      which model, where rules say so; in words, and counted
    sizes           how large it is: what is reserved, what is expected, whether it fits
    passage         its way from there to its end: queue, replica, answer, the next replica
    toll, refusals  the tenant's limits; what it is told when it is not let in
    stay, retries   its time at one replica; how often it may try another
    transcript, spent           what is kept of its answer, so that it can go on elsewhere; what it used
    fallback        the next model, where its own cannot serve it
    shadow          copies for a version that is being tried
    account, bill, course       what is kept on it: money, times, and the end of all of it
    tracing         its spans

The models' words, for counting prompts and for naming their blocks:
    lexicon, memo   tokens and names by the model's own tokenizer; what is remembered of them
    prompt_tokens   how many, as well as it can be known now, off the event loop if that takes long
    model_texts     where the tokenizer comes from
    byte_names      names where there is none

The replicas:
    roster          all of them, and the pool of each model
    replicas, reports           one: how to reach it, what it last said of itself, if it is penstock's own
    foreign, translated, fetch  one of another make: followed; spoken to in its dialect; asked for a document
    speeds          how fast, as far as that should tell them apart
    kv_follower, kv_sources, zmq_events     what their KV caches hold: penstock's, and other engines'
    health/         whether one is to be used: probes, breaker, slow start, watchdog

What is told of it all:
    recorder        the one that is told facts, and its counts for /metrics
    shadow_tally, comparison    counts of copies; of versions, side by side
    request_log, prompts, tenant_files      a line for each request; its words, if they are wanted; a file per tenant
    tracing         one request's trace: taken down as it goes, spans at its end
    decision_log, decisions     why each went to its replica, to be replayed
    state           how things stand now, for the admin API and /metrics
    notices         what anybody may read at the door: health, readiness, models
    watchtower, fleet_reader, watch_metrics, known_questions, couriers  what is wrong, who is asked, who is told

What an operator says:
    settings, route_settings, watch_settings    the file
    route_board     with what was changed at run time
    admin/          the admin API
"""

"""The JSONL batch runner: many requests in a file, one result line each, in order, resumable.

Input lines (blank lines are skipped), UTF-8:

- OpenAI's batch form: `{"custom_id", "method": "POST", "url", "body"}`, url `/v1/chat/completions` or
  `/v1/completions`. custom_id is required and unique in the file. body is what the server takes; its `model` is
  not compared, the loaded model answers. Defaults are OpenAI's, after the model's own.
- The plain form: `{"prompt": TEXT or [token ids]}` or `{"messages": […]}` with sampling fields beside it, and
  perhaps a custom_id. Unknown fields are errors. Defaults are those of `jaxinfer run`: greedy, 128 tokens.

Output lines, one for each input line, in input order; `error` is null exactly when the line was answered:

- OpenAI's form: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
- The plain form: `{"id", "line", "custom_id" if given, "text", "token_ids", "finish_reason", "stop_reason",
  "logprobs" and "prompt_logprobs" if asked for, "usage", "error"}`; with n > 1 all completions are in "completions"
  and the fields beside it are the first one's.
- A failed line: `{"id", "line", "custom_id", "error": {"message", "type", "param", "code"}}`, in OpenAI's form also
  "response": status 400 (500 when the engine failed) with the error as its body, or null when the fault is in the line
  around the body.

`id` is `batch_req_<line number>_<hash of the line and the settings>`: it is how a later run knows what is answered.
See jaxinfer.batch.output for what is kept when a run is interrupted.
"""

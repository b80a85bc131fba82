"""Server of the OpenAI API: requests, scheduler, engine thread, HTTP."""

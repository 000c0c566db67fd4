"""Export an adapter as a PEFT folder, a merged model or a GGUF file."""

-- Scripts run inside Redis: these globals exist there and nothing else does.
std = "lua51"
read_globals = { "redis", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV" }
max_line_length = 140
unused = true

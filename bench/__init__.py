"""`baton bench`: measures any server with OpenAI's API over HTTP, and nothing but HTTP.

`plan` makes the requests and their times, `client` sends them from processes of its own, `figures`
turns records into figures and verdicts, `report` writes and shows them. The room imports no code
that serves, so that it can measure any server.
"""

"""A decode component for Dynamo's stock frontend, which chooses among decode workers by their experts.

    decoders   instances and requests in a fleet keeper, signals of a request; needs no Dynamo
    component  the component: takes requests from the frontend, forwards each to the chosen instance

See docs/stacks/dynamo.md. It needs ai-dynamo-runtime, which ``pip install 'coterie[dynamo]'`` brings.
"""

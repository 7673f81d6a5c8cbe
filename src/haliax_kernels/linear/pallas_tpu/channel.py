class ChannelDecay:
    def __init__(self, plan, log): raise NotImplementedError

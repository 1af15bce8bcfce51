"""Whether a speaker has finished: a turn model beside the loop, on threads of its own."""

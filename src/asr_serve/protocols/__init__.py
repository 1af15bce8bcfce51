"""Wire formats as data: parsing of requests and encoding of answers, without HTTP."""

"""Remote encoding: messages and handshake, client side (peer_pool, connection), worker side (encode_worker,
encode_client)."""

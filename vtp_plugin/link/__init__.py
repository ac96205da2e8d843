"""The encrypted link between sites: WireGuard, and a network namespace or a firewall that keeps all others out.

Plans are data, made from a site's file without rights: :func:`~vtp_plugin.link.site_file.plan_up`. The programs ``ip``,
``wg``, ``wireguard-go`` and ``nft`` do the work. Needs neither torch nor Megatron.

Words:
    endpoint: address and UDP port at which a machine is reached from outside the link.
    peer: a machine at the other end of the link.
    reach: who can connect to what listens.
"""

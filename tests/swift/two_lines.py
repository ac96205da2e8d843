"""ms-swift's script of a rank, with two lines of ours."""

import swift.megatron

if __name__ == "__main__":
    import vtp_plugin

    vtp_plugin.apply(vtp_size_list="1,2", device="cpu")
    swift.megatron.megatron_sft_main()

// SPDX-License-Identifier: Apache-2.0

package mounts

import "testing"

func TestUncover(t *testing.T) {
	for _, c := range []struct{ path, at, want string }{
		{"/sys/fs/bpf/weir", "/sys/fs/bpf", "umount /sys/fs/bpf"},
		{"/run/my bpf/weir", "/run/my bpf", "umount '/run/my bpf'"},
		{"/sys/fs/bpf/weir", "/mnt/it's", `they are at /mnt/it's: mount --bind '/mnt/it'\''s' /sys/fs/bpf`},
	} {
		if got := Uncover(c.path, c.at); got != c.want {
			t.Errorf("%s at %s: %s, want %s", c.path, c.at, got, c.want)
		}
	}
}

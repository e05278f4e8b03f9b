// SPDX-License-Identifier: Apache-2.0

package pidfd

import "testing"

func TestParseStat(t *testing.T) {
	const tail = " S 7 4711 4711 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 5 0 123456 1000 200"
	for _, c := range []struct{ in, comm string }{
		{"4711 (nfacctd: Core Pr)" + tail, "nfacctd: Core Pr"},
		{"4711 (a) R 1 (b)" + tail, "a) R 1 (b"},
		{"4711 ()" + tail, ""},
		{"4711 (a\nb)" + tail + "\n", "a\nb"},
	} {
		info, err := parseStat(c.in)
		if err != nil || info.Comm != c.comm || info.State != 'S' || info.PPID != 7 || info.StartTime != 123456 {
			t.Errorf("parseStat(%q) = %+v, %v", c.in, info, err)
		}
	}
	for _, in := range []string{"", "1", "1 (a", "1 )a(", "1 (a) S 7", "1 (a) S x" + tail[4:], "1 (a) S 7 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 -5"} {
		if info, err := parseStat(in); err == nil {
			t.Errorf("parseStat(%q) = %+v, want an error", in, info)
		}
	}
}

func TestSocketInode(t *testing.T) {
	for in, want := range map[string]uint32{"socket:[4711]": 4711, "socket:[4294967295]": 1<<32 - 1} {
		if got, ok := socketInode(in); !ok || got != want {
			t.Errorf("socketInode(%q) = %d, %v", in, got, ok)
		}
	}
	for _, in := range []string{"pipe:[1]", "/tmp/socket:[1]", "socket:[]", "socket:[x]", "anon_inode:[eventpoll]"} {
		if got, ok := socketInode(in); ok {
			t.Errorf("socketInode(%q) = %d, want none", in, got)
		}
	}
}

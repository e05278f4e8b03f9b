// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockdiag"
)

// sock returns a socket as listed by sock_diag: "udp4 0.0.0.0:53", "tcp6 [::]:53", "tcp6only [::]:53".
func sock(t *testing.T, s string, inode uint32) sockdiag.Socket {
	t.Helper()
	proto, local, _ := strings.Cut(s, " ")
	out := sockdiag.Socket{Proto: unix.IPPROTO_TCP, Family: unix.AF_INET, Local: netip.MustParseAddrPort(local), Inode: inode}
	if strings.HasPrefix(proto, "udp") {
		out.Proto = unix.IPPROTO_UDP
	}
	switch proto[3:] {
	case "6only":
		out.V6Only = true
		fallthrough
	case "6":
		out.Family = unix.AF_INET6
	}
	return out
}

func TestFit(t *testing.T) {
	for _, c := range []struct {
		endpoint string   // of one family
		socks    []string // from best to worst; equal ones joined by =
		not      []string
	}{
		{"udp4 :53", []string{"udp4 0.0.0.0:53", "udp6 [::]:53", "udp4 192.0.2.1:53 = udp4 127.0.0.1:53", "udp6 [::ffff:192.0.2.1]:53"},
			[]string{"udp4 0.0.0.0:54", "tcp4 0.0.0.0:53", "udp6only [::]:53", "udp6 [2001:db8::1]:53"}},
		{"udp6 :53", []string{"udp6 [::]:53 = udp6only [::]:53", "udp6 [2001:db8::1]:53"},
			[]string{"udp4 0.0.0.0:53", "udp4 192.0.2.1:53", "udp6 [::ffff:192.0.2.1]:53", "tcp6 [::]:53"}},
		{"tcp 192.0.2.1:80", []string{"tcp4 192.0.2.1:80", "tcp6 [::ffff:192.0.2.1]:80", "tcp4 0.0.0.0:80", "tcp6 [::]:80"},
			[]string{"tcp4 192.0.2.2:80", "tcp6only [::]:80", "tcp6 [2001:db8::1]:80", "udp4 192.0.2.1:80"}},
		{"tcp [2001:db8::]/64:80", []string{"tcp6 [2001:db8::1]:80 = tcp6 [2001:db8::2]:80", "tcp6 [::]:80"},
			[]string{"tcp6 [2001:db8:1::1]:80", "tcp4 0.0.0.0:80"}},
	} {
		e := parse(t, c.endpoint).Endpoints(0)[0]
		last := 1 << 10
		for _, group := range c.socks {
			scores := map[int]bool{}
			for s := range strings.SplitSeq(group, " = ") {
				scores[fit(e, sock(t, s, 1))] = true
			}
			for score := range scores {
				if len(scores) != 1 || score >= last || score <= 0 {
					t.Errorf("%s: %s has fit %v, want one below %d", c.endpoint, group, scores, last)
				}
				last = score
			}
		}
		for _, s := range c.not {
			if score := fit(e, sock(t, s, 1)); score != 0 {
				t.Errorf("%s: %s has fit %d, want 0", c.endpoint, s, score)
			}
		}
	}
}

func TestWanted(t *testing.T) {
	for _, c := range []struct {
		listen, bound, want []string
	}{
		{[]string{"udp :53", "tcp 192.0.2.1:53"}, nil, []string{"udp4 :53", "udp6 :53", "tcp 192.0.2.1:53"}},
		{[]string{"udp 0.0.0.0:53", "tcp 0.0.0.0:53"}, []string{"udp 127.0.0.1:7001", "tcp :7002"}, []string{"udp 127.0.0.1:7001", "tcp4 :7002"}},
		{[]string{"udp :53"}, []string{"udp :7001"}, []string{"udp4 :7001", "udp6 :7001"}},
		// The other family than the bound address: at the same port.
		{[]string{"udp :53"}, []string{"udp 127.0.0.1:7001"}, []string{"udp 127.0.0.1:7001", "udp6 :7001"}},
		{[]string{"udp 192.0.2.0/24:53"}, []string{"udp4 :7001"}, []string{"udp4 :7001"}},
	} {
		m := bound(t, Member{PID: 1}, c.bound...)
		eps := spec(t, c.listen).Endpoints()
		var got []string
		for i, e := range BoundTo(eps, m.Bound) {
			got = append(got, e.String())
			if e.Family != eps[i].Family || e.Proto != eps[i].Proto {
				t.Errorf("%v bound to %v: %s for %s", c.listen, c.bound, e, eps[i])
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%v bound to %v is wanted at %v, want %v", c.listen, c.bound, got, c.want)
		}
	}
}

func TestChoose(t *testing.T) {
	both := []string{"udp 0.0.0.0:53", "tcp 0.0.0.0:53"}
	for name, c := range map[string]struct {
		listen, bound []string
		socks         []string   // the inode is the index plus 1
		holders       [][]uint32 // inodes
		want          string     // inodes of the chosen sockets, or part of the error
		err           error
	}{
		"both":             {both, nil, []string{"udp4 0.0.0.0:53", "tcp4 0.0.0.0:53"}, [][]uint32{{1, 2}}, "[1 2]", nil},
		"one missing":      {both, nil, []string{"udp4 0.0.0.0:53", "tcp4 0.0.0.0:53"}, [][]uint32{{1}}, "socket missing: tcp4 :53", ErrNoSocket},
		"both missing":     {both, nil, []string{"udp4 0.0.0.0:53"}, [][]uint32{{7}}, "socket missing: udp4 :53, tcp4 :53", ErrNoSocket},
		"another's":        {both, nil, []string{"udp4 0.0.0.0:53", "tcp4 0.0.0.0:53", "udp4 0.0.0.0:53"}, [][]uint32{{3, 2}}, "[3 2]", nil},
		"two processes":    {both, nil, []string{"udp4 0.0.0.0:53", "tcp4 0.0.0.0:53"}, [][]uint32{{1}, {2}}, "[1 2]", nil},
		"inherited":        {both, nil, []string{"udp4 0.0.0.0:53", "tcp4 0.0.0.0:53"}, [][]uint32{{1, 2}, {1, 2}}, "[1 2]", nil},
		"ambiguous":        {both, nil, []string{"udp4 0.0.0.0:53", "udp4 0.0.0.0:53", "tcp4 0.0.0.0:53"}, [][]uint32{{1, 2, 3}}, "udp4 :53: the member has 2 sockets there", ErrAmbiguous},
		"own family":       {[]string{"udp4 :53"}, nil, []string{"udp6 [::]:53", "udp4 0.0.0.0:53"}, [][]uint32{{1, 2}}, "[2]", nil},
		"dual stack":       {[]string{"udp :53"}, nil, []string{"udp6 [::]:53"}, [][]uint32{{1}}, "[1 1]", nil},
		"address first":    {[]string{"udp 192.0.2.1:53"}, nil, []string{"udp4 0.0.0.0:53", "udp4 192.0.2.1:53"}, [][]uint32{{1, 2}}, "[2]", nil},
		"bound":            {both, []string{"udp 127.0.0.1:7001", "tcp4 :7002"}, []string{"udp4 127.0.0.1:7001", "tcp4 0.0.0.0:7002", "udp4 0.0.0.0:53"}, [][]uint32{{1, 2, 3}}, "[1 2]", nil},
		"bound, better":    {[]string{"udp4 :53"}, []string{"udp 127.0.0.1:7001"}, []string{"udp4 0.0.0.0:7001", "udp4 127.0.0.1:7001"}, [][]uint32{{1, 2}}, "[2]", nil},
		"bound, missing":   {[]string{"udp4 :53"}, []string{"udp 127.0.0.1:7001"}, []string{"udp4 0.0.0.0:53"}, [][]uint32{{1}}, "socket missing: udp 127.0.0.1:7001", ErrNoSocket},
		"bound, ambiguous": {[]string{"udp4 :53"}, []string{"udp4 :7001"}, []string{"udp4 0.0.0.0:7001", "udp4 0.0.0.0:7001"}, [][]uint32{{1, 2}}, "udp4 :7001: the member has 2", ErrAmbiguous},
	} {
		m := bound(t, Member{PID: 1}, c.bound...)
		p := slotSockets{eps: spec(t, c.listen).Endpoints()}
		p.at = BoundTo(p.eps, m.Bound)
		var all []sockdiag.Socket
		for i, s := range c.socks {
			all = append(all, sock(t, s, uint32(i+1)))
		}
		for _, e := range p.at {
			p.socks = append(p.socks, ranked(e, all))
		}
		var owners []owner
		for _, inodes := range c.holders {
			h := owner{fds: map[uint32][]int{}}
			for _, n := range inodes {
				h.fds[n] = []int{int(n)}
			}
			owners = append(owners, h)
		}
		chosen, err := choose(p, owners, false)
		var inodes []uint32
		for i, ch := range chosen {
			inodes = append(inodes, ch.socket.Inode)
			if ch.endpoint != p.eps[i] || len(ch.owner.fds[ch.socket.Inode]) == 0 {
				t.Errorf("%s: chose %+v for %s", name, ch, p.eps[i])
			}
		}
		switch {
		case !errors.Is(err, c.err):
			t.Errorf("%s: %v, want %v", name, err, c.err)
		case c.err != nil && !strings.Contains(err.Error(), c.want):
			t.Errorf("%s: %v, want it to say %q", name, err, c.want)
		case c.err == nil && fmt.Sprint(inodes) != c.want:
			t.Errorf("%s: chose %v, want %s", name, inodes, c.want)
		}
	}
}

// With group, any of several equally bound sockets represents its group.
func TestChooseOfGroup(t *testing.T) {
	for name, c := range map[string]struct {
		listen string
		socks  []string
		err    error
	}{
		"a group":          {"udp4 127.0.0.1:53", []string{"udp4 127.0.0.1:53", "udp4 127.0.0.1:53"}, nil},
		"dual-stack":       {"udp :53", []string{"udp6 [::]:53", "udp6 [::]:53"}, nil},
		"at two addresses": {"udp4 127.0.0.0/8:53", []string{"udp4 127.0.0.1:53", "udp4 127.0.0.2:53"}, ErrAmbiguous},
		"at another port":  {"udp4 127.0.0.1:54", []string{"udp4 127.0.0.1:53", "udp4 127.0.0.1:53"}, ErrNoSocket},
	} {
		p := slotSockets{eps: spec(t, []string{c.listen}).Endpoints()}
		p.at = p.eps
		h := owner{fds: map[uint32][]int{}}
		var all []sockdiag.Socket
		for i, s := range c.socks {
			all = append(all, sock(t, s, uint32(i+1)))
			h.fds[uint32(i+1)] = []int{3 + i}
		}
		for _, e := range p.at {
			p.socks = append(p.socks, ranked(e, all))
		}
		chosen, err := choose(p, []owner{h}, true)
		if !errors.Is(err, c.err) || err == nil && len(chosen) != len(p.eps) {
			t.Errorf("%s: chose %+v, %v, want error %v", name, chosen, err, c.err)
		}
	}
	if alike(sockdiag.Socket{Interface: 1}, sockdiag.Socket{Interface: 2}) {
		t.Error("sockets of two interfaces are alike")
	}
}

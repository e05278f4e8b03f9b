// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func listen(proto, addr string, only6 bool) Listen {
	return Listen{proto, netip.MustParseAddrPort(addr), only6}
}

// The text of a listen is the one of weir.yaml with the same packets.
func TestListenString(t *testing.T) {
	for want, l := range map[string]Listen{
		"udp 0.0.0.0:53":       listen("udp", "0.0.0.0:53", false),
		"udp :53":              listen("udp", "[::]:53", false),
		"udp6 [::]:53":         listen("udp", "[::]:53", true),
		"tcp 192.0.2.1:80":     listen("tcp", "192.0.2.1:80", false),
		"tcp [2001:db8::1]:80": listen("tcp", "[2001:db8::1]:80", false),
	} {
		if got := l.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestNameServices(t *testing.T) {
	at := []Listen{listen("udp", "0.0.0.0:53", false)}
	all := []Program{{Name: "knotd", Listens: at}, {Name: "knotd", Listens: at, Netns: "red"}, {Name: "knotd", Listens: at}, {Name: "knotd", Listens: at}, {Name: "-a b", Listens: at}}
	nameServices(all)
	var got []string
	for _, p := range all {
		got = append(got, p.Service)
	}
	if want := []string{"knotd", "knotd-red", "knotd-53", "knotd-53-2", "a_b"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRoleOf(t *testing.T) {
	for want, p := range map[Role]Program{
		Collector: {Name: "nfacctd"}, DNS: {Name: "own-dns", Listens: []Listen{listen("udp", "0.0.0.0:53", false)}},
		Access: {Name: "own-ssh", Listens: []Listen{listen("tcp", "0.0.0.0:22", false), listen("tcp", "0.0.0.0:80", false)}},
		Other:  {Name: "game", Listens: []Listen{listen("udp", "0.0.0.0:27015", false)}},
	} {
		if got := roleOf(p.Name, p.Listens); got != want {
			t.Errorf("%s: got %s, want %s", p.Name, got, want)
		}
	}
}

func TestParsePeers(t *testing.T) {
	got, err := parsePeers([]byte("% Can't open configuration file\n" +
		`[{"multihop":true,"peer":"192.0.2.9"},{"multihop":false,"peer":"fe80::2","interface":"eth1","status":"down"},{"peer":"10.0.0.2","status":"up"}]`))
	want := []Peer{{netip.MustParseAddr("10.0.0.2"), "", true}, {netip.MustParseAddr("fe80::2"), "eth1", false}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for _, text := range []string{"", "[{", "no such command"} {
		if _, err := parsePeers([]byte(text)); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

func TestOption(t *testing.T) {
	args := []string{"bfdd", "--vty_socket", "/run/a", "-N=b", "--dplaneaddr=unix:/run/c", "-N"}
	for name, want := range map[string]string{"--vty_socket": "/run/a", "-N": "b", "--dplaneaddr": "unix:/run/c", "--pathspace": ""} {
		if got := option(args, name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
}

// Sockets of this process appear once, under its topmost process.
func TestGather(t *testing.T) {
	nstest.NeedRoot(t)
	u, err := net.ListenPacket("udp4", "127.0.0.1:4739")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	h, err := Gather(t.Context(), Options{Workload: func(string) (string, string) { return "some.service", "" }})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Programs) != 1 || len(h.Programs[0].Instances) != 1 || len(h.Unseen) != 0 {
		t.Fatalf("got %+v", h)
	}
	p := h.Programs[0]
	if i := p.Instances[0]; p.Role != Collector || !p.Local() || i.Unit != "some.service" || i.Sockets != 1 || i.PID != os.Getpid() && i.PID != os.Getppid() {
		t.Errorf("got %+v", p)
	}
	if n := h.Namespaces; len(n) != 1 || len(n[0].Interfaces) != 1 || !n[0].Interfaces[0].Loopback || n[0].Rules != nil || n[0].FRR != nil {
		t.Errorf("got %+v", n)
	}
}

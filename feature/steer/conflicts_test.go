// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"golang.org/x/sys/unix"
)

// TestBindingOfEveryPortWarns checks the warnings about a binding of every port on this host's addresses. It takes
// answers and traffic of other sockets. The service's own sockets and foreign addresses cause no warning.
func TestBindingOfEveryPortWarns(t *testing.T) {
	w, _ := collectors(t, spec.Options{Slots: 1})
	w.apply()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	own, err := net.ListenPacket("udp4", "127.0.0.1:5353")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	takes := func(prefix string, proto bindings.Proto, port uint16) string {
		return strings.Join(state.BindingConflicts(w.root, ns, bindings.Binding{Service: "svc", Prefix: netip.MustParsePrefix(prefix), Proto: proto, Port: port}), "\n")
	}
	all := takes("127.0.0.0/8", unix.IPPROTO_UDP, 0)
	if !strings.Contains(all, "answers of DNS") || !strings.Contains(all, "at 127.0.0.1:5353 loses its traffic") || strings.Contains(all, ":9991 loses") {
		t.Errorf("every UDP port of this host: %s", all)
	}
	if s := takes("127.0.0.0/8", unix.IPPROTO_TCP, 0); strings.Contains(s, "DNS") {
		t.Errorf("every TCP port: %s", s)
	}
	for _, s := range []string{takes("192.0.2.0/24", unix.IPPROTO_UDP, 0), takes("127.0.0.0/8", unix.IPPROTO_UDP, 4000)} {
		if s != "" {
			t.Errorf("nothing is taken, and it says %s", s)
		}
	}
}

// TestPmacctLimit reads the router limit from the daemon's own file and from no other.
func TestPmacctLimit(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		name, text string
		want       int
	}{
		{"default", "bmp_daemon: true\n! bmp_daemon_max_peers: 7\n", 0},
		{"set", "bmp_daemon: true\nbmp_daemon_max_peers: 180\n", 180},
		{"of a plugin", "bmp_daemon_max_peers[x] :  12 \n", 12},
		{"nonsense", "bmp_daemon_max_peers: many\n", 0},
	} {
		if got, err := readPmacct(write(c.name, c.text), os.Getpid()); err != nil || got != c.want {
			t.Errorf("%s: %d, %v; want %d", c.name, got, err, c.want)
		}
	}
	fifo, link := filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "set"), link); err != nil {
		t.Fatal(err)
	}
	refused := []string{fifo, dir, "/proc/self/limits"}
	if os.Lchown(link, 65534, 65534) == nil { // root's own links are followed
		refused = append(refused, link)
	}
	for _, path := range refused {
		if _, err := readPmacct(path, os.Getpid()); err == nil {
			t.Errorf("%s was read", path)
		}
	}
	if got := optionF([]string{"nfacctd", "-d", "-f", "/etc/a.conf", "-f/etc/b.conf", "-f", "relative"}); !slices.Equal(got, []string{"/etc/a.conf", "/etc/b.conf"}) {
		t.Errorf("files of a command line: %q", got)
	}
}

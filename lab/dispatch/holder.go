// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"golang.org/x/sys/unix"
)

// perHolder is the number of services of a process. With one socket each, it stays below the common limit
// of 20,000 descriptors.
const perHolder = 16384

// The socket of a service is bound to its own address, and to a port below the range of clients.
const firstPort = 10000

func ownAddress(service int) [4]byte { return [4]byte{198, 18, byte(service >> 8), byte(service)} }
func ownPort(service int) int        { return firstPort + service%perHolder }

// holdArg makes the lab's own binary hold services; see Hold.
const holdArg = "__dispatch-services"

// unregistered replaces the root of pins for unregistered services.
const unregistered = "-"

// Hold handles "weir-lab __dispatch-services ROOT FIRST COUNT MAP": it turns the process into a holder of
// COUNT services. It opens their sockets, registers them, puts them into the socket map of this id, and
// prints "ready". It answers connections and datagrams with the number of the service. main calls Hold
// first. It returns if the process is no such child.
func Hold() {
	if len(os.Args) != 6 || os.Args[1] != holdArg {
		return
	}
	fmt.Fprintln(os.Stderr, "ERROR:", runHolder(os.Args[2], os.Args[3:]))
	os.Exit(1)
}

func runHolder(root string, numbers []string) error {
	var n [3]int
	for i, s := range numbers {
		var err error
		if n[i], err = strconv.Atoi(s); err != nil {
			return err
		}
	}
	h := holder{serviceOf: map[int32]int{}}
	var err error
	if h.poll, err = unix.EpollCreate1(0); err != nil {
		return err
	}
	var all []bindings.Registration
	for service := n[0]; service < n[0]+n[1]; service++ {
		fd, err := h.open(service)
		if err != nil {
			return fmt.Errorf("socket of service %d: %w", service, err)
		}
		all = append(all, bindings.Registration{Service: serviceName(service), FD: fd})
	}
	if n[2] != 0 {
		if err := shareSockets(ebpf.MapID(n[2]), n[0], all); err != nil {
			return err
		}
	}
	if root != unregistered {
		if err := register(root, all); err != nil {
			return err
		}
	}
	fmt.Println(ready)
	return h.serve()
}

const ready = "ready"

// shareSockets puts the sockets into the map of the other program, too.
func shareSockets(id ebpf.MapID, first int, all []bindings.Registration) error {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return err
	}
	defer m.Close()
	for i, r := range all {
		if err := m.Put(uint32(first+i), uint64(r.FD)); err != nil {
			return fmt.Errorf("socket of %s into the map for LPM_TRIE: %w", r.Service, err)
		}
	}
	return nil
}

func register(root string, all []bindings.Registration) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	l, err := kernel.OpenRoot(root).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	_, err = bindings.RegisterSockets(l, ns, all)
	return err
}

// holder answers for services, on one thread.
type holder struct {
	poll      int
	serviceOf map[int32]int
}

func (h *holder) open(service int) (fd int, err error) {
	tcp := serviceProto(service) == unix.IPPROTO_TCP
	kind := unix.SOCK_DGRAM
	if tcp {
		kind = unix.SOCK_STREAM
	}
	if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: ownAddress(service), Port: ownPort(service)}); err == nil && tcp {
		err = unix.Listen(fd, 128)
	}
	if err == nil {
		err = unix.EpollCtl(h.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	h.serviceOf[int32(fd)] = service
	return fd, err
}

func (h *holder) serve() error {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(h.poll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		for _, e := range events[:max(0, n)] {
			service := h.serviceOf[e.Fd]
			if serviceProto(service) == unix.IPPROTO_TCP {
				h.accept(int(e.Fd), service)
			} else {
				h.answer(int(e.Fd), service)
			}
		}
	}
}

// accept sends the answer to a new connection. A client already closed needs no error.
func (h *holder) accept(fd, service int) {
	conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
	if err != nil {
		return
	}
	_, _ = unix.Write(conn, binary.BigEndian.AppendUint32(nil, uint32(service)))
	unix.Close(conn)
}

// answer returns one datagram with the number of the service appended.
func (h *holder) answer(fd, service int) {
	var b [64]byte
	n, from, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
	if err == nil && n == nonceBytes {
		_ = unix.Sendto(fd, binary.BigEndian.AppendUint32(b[:n], uint32(service)), 0, from)
	}
}

// readiness collects the output of a process until it prints "ready".
type readiness struct {
	mu   sync.Mutex
	text bytes.Buffer
	ok   chan struct{}
	once sync.Once
}

func (r *readiness) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text.Len() < 1<<12 {
		r.text.Write(b)
	}
	if bytes.HasPrefix(r.text.Bytes(), []byte(ready)) {
		r.once.Do(func() { close(r.ok) })
	}
	return len(b), nil
}

func (r *readiness) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// startServices starts the processes for these services in a namespace, and returns when all are ready. The
// sockets are registered only with a root.
func startServices(ctx context.Context, e *lab.Env, namespace, root string, services int, share *ebpf.Map) ([]*lab.Process, error) {
	var processes []*lab.Process
	var said []*readiness
	id := ebpf.MapID(0)
	if share != nil {
		info, err := share.Info()
		if err != nil {
			return nil, err
		}
		id, _ = info.ID()
	}
	for first := 0; first < services; first += perHolder {
		out := &readiness{ok: make(chan struct{})}
		p, err := e.Start(lab.Command{Namespace: namespace, Path: e.Self(), Output: out, Args: []string{holdArg, root,
			strconv.Itoa(first), strconv.Itoa(min(perHolder, services-first)), strconv.Itoa(int(id))}})
		if err != nil {
			return nil, err
		}
		processes, said = append(processes, p), append(said, out)
	}
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for i, p := range processes {
		select {
		case <-said[i].ok:
		case <-p.Done():
			return nil, fmt.Errorf("a holder of services ended: %w: %s", errors.Join(p.Err(), errEnded), said[i])
		case <-limit.C:
			return nil, fmt.Errorf("the services were not ready after two minutes")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return processes, nil
}

var errEnded = errors.New("want a running process")

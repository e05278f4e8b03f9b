// SPDX-License-Identifier: Apache-2.0

// Command echo sends back its input, over TCP and UDP. It supports all bindings of weir: any
// address, any port, any number of them.
//
//	echo -listen 127.0.0.1:9999 -listen [::1]:9999
//
// Without -listen it serves the sockets passed in LISTEN_FDS.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

func main() {
	var addresses []string
	flag.Func("listen", "serve TCP and UDP at this address and port; may be repeated", func(s string) error {
		addresses = append(addresses, s)
		return nil
	})
	flag.Parse()
	if err := run(addresses); err != nil {
		log.Fatal(err)
	}
}

func run(addresses []string) error {
	streams, packets, err := open(addresses)
	if err != nil {
		return err
	}
	failed := make(chan error)
	for _, l := range streams {
		fmt.Println("listening on tcp", l.Addr())
		go func() { failed <- serveTCP(l) }()
	}
	for _, c := range packets {
		fmt.Println("listening on udp", c.LocalAddr())
		go func() { failed <- serveUDP(c) }()
	}
	return <-failed
}

func open(addresses []string) (streams []net.Listener, packets []*net.UDPConn, err error) {
	if len(addresses) == 0 {
		return passed()
	}
	var config net.ListenConfig
	// Go uses MPTCP for listeners by default, and no BPF program can assign connections to those.
	config.SetMultipathTCP(false)
	for _, address := range addresses {
		l, err := config.Listen(context.Background(), "tcp", address)
		if err != nil {
			return nil, nil, err
		}
		c, err := config.ListenPacket(context.Background(), "udp", address)
		if err != nil {
			return nil, nil, err
		}
		streams, packets = append(streams, l), append(packets, c.(*net.UDPConn))
	}
	return streams, packets, nil
}

// passed returns the sockets passed by the parent process, as by systemd (sd_listen_fds(3)).
func passed() (streams []net.Listener, packets []*net.UDPConn, err error) {
	n, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if pid := os.Getenv("LISTEN_PID"); n < 1 || pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return nil, nil, errors.New("no -listen, and no sockets passed (LISTEN_FDS)")
	}
	const first = 3 // SD_LISTEN_FDS_START
	for fd := first; fd < first+n; fd++ {
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		file := os.NewFile(uintptr(fd), "passed")
		if kind == unix.SOCK_STREAM {
			l, err := net.FileListener(file)
			if err != nil {
				return nil, nil, err
			}
			streams = append(streams, l)
		} else {
			c, err := net.FilePacketConn(file)
			if err != nil {
				return nil, nil, err
			}
			udp, ok := c.(*net.UDPConn)
			if !ok {
				return nil, nil, fmt.Errorf("descriptor %d: neither TCP nor UDP", fd)
			}
			packets = append(packets, udp)
		}
		file.Close() // net returned a duplicate
	}
	return streams, packets, nil
}

// serveTCP needs no code for bindings. An accepted connection has the address and port used by the
// client (c.LocalAddr()), for any address of the listener.
func serveTCP(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c) // ends with the connection
		}()
	}
}

// control calls f with a socket's descriptor.
func control(c syscall.RawConn, f func(fd int) error) error {
	var err error
	return errors.Join(c.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// SPDX-License-Identifier: Apache-2.0

// Command sink is the daemon of the systemd tests, without any knowledge of weir. `sink serve`
// answers every datagram and connection with its name. It uses its own sockets or those passed by
// systemd (LISTEN_FDS). `sink ask` is its client: it prints the name in the answer, or the kind of
// refusal. `sink each` asks from many addresses in one process, because under emulation a process
// start takes longer than a question.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const usage = `usage: sink serve -name NAME [-reuseport] [-listen ADDRESS:PORT]
       sink ask [-from ADDRESS] [-wait DURATION] udp|tcp ADDRESS:PORT
       sink each [-wait DURATION] ADDRESS:PORT   (lines on standard input: FROM NAME, which is to answer over UDP and TCP)`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	run := map[string]func([]string) error{"serve": serve, "ask": ask, "each": each}[os.Args[1]]
	if run == nil {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	if err := run(os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "sink:", err)
		os.Exit(1)
	}
}

func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	name := flags.String("name", "", "text of the answers")
	listen := flags.String("listen", "", "address of the UDP and of the TCP socket; empty: use systemd's sockets")
	reuseport := flags.Bool("reuseport", false, "set SO_REUSEPORT to share the address among sinks")
	flags.Parse(args)

	var listener net.Listener
	var packets net.PacketConn
	var err error
	if *listen == "" {
		listener, packets, err = inherited()
	} else {
		listener, packets, err = open(*listen, *reuseport)
	}
	if err != nil {
		return err
	}
	failed := make(chan error, 2)
	go func() { failed <- answerConnections(listener, *name) }()
	go func() { failed <- answerDatagrams(packets, *name) }()
	return <-failed
}

// inherited returns the sockets of LISTEN_FDS (sd_listen_fds(3)): one stream socket and one
// datagram socket, in any order.
func inherited() (listener net.Listener, packets net.PacketConn, err error) {
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil, errors.New("no -listen, and systemd passes no sockets to this process")
	}
	n, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	for fd := 3; fd < 3+n; fd++ {
		file := os.NewFile(uintptr(fd), "listen")
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		if kind == unix.SOCK_STREAM {
			listener, err = net.FileListener(file)
		} else {
			packets, err = net.FilePacketConn(file)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		file.Close()
	}
	if listener == nil || packets == nil {
		return nil, nil, fmt.Errorf("of %d sockets passed, a stream or a datagram socket is missing", n)
	}
	return listener, packets, nil
}

func open(address string, reuseport bool) (net.Listener, net.PacketConn, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if reuseport {
			c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			})
		}
		return err
	}}
	// Go uses MPTCP for listeners by default; steered daemons do not.
	config.SetMultipathTCP(false)
	packets, err := config.ListenPacket(context.Background(), "udp", address)
	if err != nil {
		return nil, nil, err
	}
	listener, err := config.Listen(context.Background(), "tcp", address)
	return listener, packets, err
}

func answerConnections(listener net.Listener, name string) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		io.WriteString(conn, name)
		conn.Close()
	}
}

func answerDatagrams(packets net.PacketConn, name string) error {
	buffer := make([]byte, 2048)
	for {
		_, from, err := packets.ReadFrom(buffer)
		if err != nil {
			return err
		}
		// Continue after a client is gone.
		packets.WriteTo([]byte(name), from)
	}
}

func ask(args []string) error {
	flags := flag.NewFlagSet("ask", flag.ExitOnError)
	from := flags.String("from", "", "source address")
	wait := flags.Duration("wait", 2*time.Second, "how long to wait for an answer")
	flags.Parse(args)
	if flags.NArg() != 2 || (flags.Arg(0) != "udp" && flags.Arg(0) != "tcp") {
		return errors.New(usage)
	}
	answer, err := question(flags.Arg(0), *from, flags.Arg(1), *wait)
	if err != nil {
		return err
	}
	fmt.Println(answer)
	return nil
}

// each asks from every address on standard input, over both protocols. It fails at the first answer
// from an unexpected name.
func each(args []string) error {
	flags := flag.NewFlagSet("each", flag.ExitOnError)
	wait := flags.Duration("wait", 20*time.Second, "how long to wait for an answer")
	flags.Parse(args)
	if flags.NArg() != 1 {
		return errors.New(usage)
	}
	return askEach(os.Stdin, flags.Arg(0), *wait)
}

func askEach(lines io.Reader, to string, wait time.Duration) error {
	in := bufio.NewScanner(lines)
	n := 0
	for ; in.Scan(); n++ {
		from, want, _ := strings.Cut(in.Text(), " ")
		for _, network := range []string{"udp", "tcp"} {
			got, err := question(network, from, to, wait)
			if err != nil {
				return fmt.Errorf("%s %s from %s: %w", network, to, from, err)
			}
			if got != want {
				return fmt.Errorf("%s %s from %s: got %s, want %s", network, to, from, got, want)
			}
		}
	}
	if in.Err() == nil && n == 0 {
		return errors.New("no address on standard input")
	}
	return in.Err()
}

// question returns the name in the answer, "refused" (TCP reset, ICMP port unreachable) or
// "silence" (no answer in time).
func question(network, from, to string, wait time.Duration) (string, error) {
	dialer := net.Dialer{Timeout: wait}
	dialer.SetMultipathTCP(false)
	if from != "" {
		source := net.JoinHostPort(from, "0")
		if network == "udp" {
			dialer.LocalAddr, _ = net.ResolveUDPAddr(network, source)
		} else {
			dialer.LocalAddr, _ = net.ResolveTCPAddr(network, source)
		}
	}
	answer, err := exchange(dialer, network, to, wait)
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		return "refused", nil
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence", nil
	}
	return answer, err
}

func exchange(dialer net.Dialer, network, to string, wait time.Duration) (string, error) {
	conn, err := dialer.Dial(network, to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(wait))
	if network == "tcp" {
		answer, err := io.ReadAll(conn)
		return strings.TrimSpace(string(answer)), err
	}
	if _, err := io.WriteString(conn, "?"); err != nil {
		return "", err
	}
	buffer := make([]byte, 2048)
	n, err := conn.Read(buffer)
	return string(buffer[:n]), err
}

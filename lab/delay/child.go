// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// childArg makes the lab's binary carry a line's packets; see Play.
const childArg = "__delay"

// Between the lab and the process that carries the packets: it says that it is ready,
// and answers the signal with its numbers.
const (
	sayReady  = "ready"
	askSignal = unix.SIGUSR1
)

// setup is what the process is told, as JSON in its argument.
type setup struct {
	Seed   uint64
	Ends   [2]end
	Lines  [2]Line // from end 0 to end 1, and back
	Device string  // which of openers
}

type end struct{ Namespace, Name string }

// Play turns a process that [New] started into the one that carries a line's packets.
// main and TestMain call it first; in any other process it returns.
func Play() {
	if len(os.Args) != 3 || os.Args[1] != childArg {
		return
	}
	if err := play(os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "delay line:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// play carries packets until it is ended, and answers each signal with the numbers.
func play(arg string) error {
	var s setup
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return err
	}
	asked := make(chan os.Signal, 16)
	signal.Notify(asked, askSignal)
	// Whoever collects garbage stops all threads. There is none: buffers are used again.
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(4) // two of them never let go of theirs
	var fds [2]int
	for i, e := range s.Ends {
		fd, err := open(e, openers[s.Device], s.Lines[i].large())
		if err != nil {
			return fmt.Errorf("device %s: %w", e.Name, err)
		}
		fds[i] = fd
	}
	var ways [2]*direction
	for i := range ways {
		ways[i] = &direction{in: fds[i], out: fds[1-i], line: s.Lines[i], fates: newFates(s.Lines[i], s.Seed, i)}
		go func() {
			runtime.LockOSThread()
			hurry()
			ways[i].run()
		}()
	}
	fmt.Println(sayReady)
	for range asked {
		b, err := json.Marshal([2]Stats{ways[0].stats(), ways[1].stats()})
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", b)
	}
	return nil // never: the channel is not closed
}

// hurry has the kernel run the calling thread as soon as there is something to do.
// A container may refuse: then the lateness tells.
func hurry() {
	const fifo = 1
	priority := struct{ value int32 }{20}
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, fifo, uintptr(unsafe.Pointer(&priority)))
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
}

// openers make a device, or open one that is there, and say by which descriptor its
// frames come and go. The package's benchmark has another one.
var openers = map[string]opener{"": openTAP}

// opener is called in the device's namespace. large: TCP's large packets may come uncut.
type opener func(name string, large bool) (fd int, err error)

// open makes or opens an end's device, and returns to no namespace: the thread is thrown away.
func open(e end, how opener, large bool) (fd int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked
		if err = enter(e.Namespace); err != nil {
			return
		}
		fd, err = how(e.Name, large)
	}()
	<-done
	return fd, err
}

func enter(namespace string) error {
	f, err := os.Open(namespace)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
}

// queueLen is how many packets a device keeps for a reader that is not running.
const queueLen = 20000

// openTAP makes a device whose other side is the descriptor. It vanishes with it.
func openTAP(name string, large bool) (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil {
		offload := unix.TUN_F_CSUM
		if large {
			offload |= unix.TUN_F_TSO4 | unix.TUN_F_TSO6
		}
		err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offload)
	}
	if err == nil {
		err = up(name)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func up(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetTxQLen(l, queueLen), netlink.LinkSetUp(l))
}

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

// The protocol between the lab and the carrying process: it prints ready, and answers the signal with its
// counters.
const (
	sayReady  = "ready"
	askSignal = unix.SIGUSR1
)

// setup is the process's configuration, as JSON in its argument.
type setup struct {
	Seed   uint64
	Ends   [2]end
	Lines  [2]Line // from end 0 to end 1, and back
	Device string  // key of openers
}

type end struct{ Namespace, Name string }

// Play turns a process started by [New] into the carrier of a line's packets. main and TestMain call it
// first. In any other process it returns.
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

// play carries packets until it is killed, and answers each signal with the counters.
func play(arg string) error {
	var s setup
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return err
	}
	asked := make(chan os.Signal, 16)
	signal.Notify(asked, askSignal)
	// Garbage collection stops all threads. It is off, because buffers are reused.
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(4) // two of them stay occupied
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

// hurry makes the kernel run the calling thread as soon as it is runnable. A container may refuse: the
// lateness then shows it.
func hurry() {
	const fifo = 1
	priority := struct{ value int32 }{20}
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, fifo, uintptr(unsafe.Pointer(&priority)))
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
}

// openers create a device, or open an existing one, and return the descriptor for its frames. The package's
// benchmark adds another one.
var openers = map[string]opener{"": openTAP}

// opener is called in the device's namespace. large permits TCP's large packets uncut.
type opener func(name string, large bool) (fd int, err error)

// open creates or opens an end's device in a thread of its own. The thread stays in the namespace and is
// discarded.
func open(e end, how opener, large bool) (fd int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked
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

// queueLen is the number of packets a device queues for a reader without CPU.
const queueLen = 20000

// openTAP creates a device with the descriptor as its other side. It vanishes with the descriptor.
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
